"""Headers: announced to everybody, heard from everybody, pooled until one is chosen; and asking for help."""
