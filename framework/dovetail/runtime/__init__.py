"""Running a model: device state, runner, sampler, weight loading."""
