"""Tasks: the sources of questions and the judges of answers, which always run on this machine."""
