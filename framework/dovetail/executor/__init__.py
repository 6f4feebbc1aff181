"""What computes an engine's steps: the devices, behind `messages.executor.Executor`."""
