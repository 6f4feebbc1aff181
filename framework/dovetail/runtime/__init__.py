"""Running a model: config, weights, device state, batches, sampler. Importing the package does not import torch."""
