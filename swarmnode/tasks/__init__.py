"""Where questions come from and how answers are judged, always on this machine."""
