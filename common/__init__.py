"""What the cloud and the edge share: layout, codecs, aggregator, journal and transport. Imports neither of them."""
