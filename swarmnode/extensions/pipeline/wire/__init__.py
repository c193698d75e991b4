"""Messages between members, tensors as bytes, bounded streams, and emulated slow links."""
