"""Holds `dovetail-plugins.json`, which lets `--quantization auto` find the plugin without importing it."""
