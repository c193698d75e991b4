"""Mending answers of strangers before anything is learnt from them."""
