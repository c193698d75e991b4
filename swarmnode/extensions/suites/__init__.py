"""Standard evaluations: files of questions that are asked as everybody asks them, and never trained on."""
