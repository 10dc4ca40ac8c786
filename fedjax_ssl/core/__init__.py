"""Nouns, passes and local training: the part no method re-writes."""
