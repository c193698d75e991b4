"""The page of a running node: one server for people, commands and Prometheus."""
