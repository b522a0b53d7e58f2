"""What a finished run is for: its models, predictions and exports."""
