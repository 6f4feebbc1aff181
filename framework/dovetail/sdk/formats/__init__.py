"""Reading of replies: what a format says of its markers and calls, and the machine that turns tokens into events."""
