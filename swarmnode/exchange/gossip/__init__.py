"""Headers: announced to everybody, heard from everybody, and pooled until one is chosen; and asking for
help."""
