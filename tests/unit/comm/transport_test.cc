// The suite of tests/support/transport_suite.h over the transports of engine/comm.
#include "engine/comm/local_transport.h"
#include "tests/support/tcp_group.h"
#include "tests/support/transport_suite.h"

namespace ds4 {
namespace {

INSTANTIATE_TEST_SUITE_P(Local, TransportTest,
                         testing::Values(TransportKind{"local", MakeLocalTransports}));
INSTANTIATE_TEST_SUITE_P(Tcp, TransportTest,
                         testing::Values(TransportKind{"tcp", MakeTcpTransports}));

}  // namespace
}  // namespace ds4
