"""What things are: frozen, slotted, keyword-only dataclasses without I/O."""
