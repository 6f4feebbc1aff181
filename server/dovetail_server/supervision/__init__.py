"""What keeps work alive: background tasks of this process, and the process of the engine."""
