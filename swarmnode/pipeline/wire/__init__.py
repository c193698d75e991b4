"""What members send each other: messages, tensors as bytes, bounded streams; links slower than real ones."""
