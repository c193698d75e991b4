"""From untrusted bytes to a group that was drawn, tokenized and scored on this machine."""
