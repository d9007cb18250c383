"""`race`: several streams of the target, each from a place that the draft foretells."""
