"""Settings of `dovetail serve`."""
