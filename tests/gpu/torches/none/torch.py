"""A process over the stand-in GPU needs no torch, and saves the time of its import."""

raise ImportError("this process has no torch")
