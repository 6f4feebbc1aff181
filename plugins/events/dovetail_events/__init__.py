"""Plugins that tell other programs what happens here."""
