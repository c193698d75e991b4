"""A workbench for who writes a task: a template, a check, a description, a game against a model."""

from swarmnode.registry import Parts

PARTS: Parts = {"command": {"task": "swarmnode.extensions.workbench.task_commands:app"}}
