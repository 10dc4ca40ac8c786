"""Types, passes of a round and local training: what all methods share."""
