"""Messages: payloads with declared fields, and their translation to Flower's records."""
