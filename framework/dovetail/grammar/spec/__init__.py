"""What is asked: grammars of requests and tools, made regular, and which backend enforces them how far."""
