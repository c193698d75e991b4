"""The one protocol between members: framed messages with tensors as bytes, bounded streams, access checks."""
