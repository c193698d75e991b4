"""Processes in which the code of tasks runs: started, asked, timed, replaced and ended by the node."""
