"""The devices that Dovetail brings."""
