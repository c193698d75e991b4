"""Rules by name: the lessons of a round's own and foreign groups, and the right answers that are kept."""
