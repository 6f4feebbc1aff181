"""Layers that models are composed of; they carry fusing, sharding and loading."""
