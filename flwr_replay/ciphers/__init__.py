"""Between the wire and an institution whose keys are pinned: parcels that only institutions open, and masks."""
