"""What lies on the device between steps: tables, rows and their parameters, and how changes get there."""
