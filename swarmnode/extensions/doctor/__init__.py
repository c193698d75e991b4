"""The doctor: is a machine fit to join, and if not, what to do first."""

from swarmnode.registry import Parts

PARTS: Parts = {"command": {"doctor": "swarmnode.extensions.doctor.doctor_command:doctor"}}
