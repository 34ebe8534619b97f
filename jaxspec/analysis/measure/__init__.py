"""What is so on this machine: one quantity a file, each measured for a checked `decode.request.Prepared`."""
