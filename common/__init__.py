"""What the cloud and the edge share: layout, codecs, aggregator, journal and transport. Imports neither of them."""

import fleetddp.common.fork  # noqa: F401  runs before any module of ours imports grpc
