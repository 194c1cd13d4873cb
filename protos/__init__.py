"""The wire: ``fleet.proto``, its generated stubs (`make protos`) and the rules in WIRE.md."""
