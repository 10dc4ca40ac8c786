"""Running methods: the loop of rounds, evaluation, and what is written."""
