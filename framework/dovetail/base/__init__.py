"""The ground that every room stands on: settings, logs, processes and small files."""
