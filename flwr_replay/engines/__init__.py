"""What executes a run: in this process, in workers, on Ray, over a SuperLink."""
