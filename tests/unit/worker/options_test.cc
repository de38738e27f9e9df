// Goal: every option means what --help says, and a bad one is refused naming option, value and
// range. Method: command lines as a shell would give them.
#include "worker/options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <initializer_list>
#include <vector>

namespace ds4 {
namespace {

using ::testing::HasSubstr;

Result<std::variant<WorkerOptions, PrintAndExit>> Parse(std::initializer_list<const char*> args) {
  std::vector<const char*> argv = {"ds4-worker"};
  argv.insert(argv.end(), args);
  return ParseWorkerOptions(static_cast<int>(argv.size()), argv.data());
}

WorkerOptions Good(std::initializer_list<const char*> args) {
  auto parsed = Parse(args);
  EXPECT_TRUE(parsed.ok()) << parsed.status();
  return parsed.ok() ? std::get<WorkerOptions>(*parsed) : WorkerOptions();
}

std::string ErrorOf(std::initializer_list<const char*> args) {
  auto parsed = Parse(args);
  EXPECT_FALSE(parsed.ok());
  EXPECT_EQ(parsed.status().code(), StatusCode::kInvalidArgument);
  return parsed.status().message();
}

TEST(WorkerOptions, DefaultsStayOnThisHost) {
  const WorkerOptions options = Good({"--model", "m.gguf"});
  EXPECT_EQ(options.model_path, "m.gguf");
  EXPECT_EQ(options.listen.host, "127.0.0.1");
  EXPECT_EQ(options.listen.port, 9911);
  EXPECT_EQ(options.data_port, 0);
  EXPECT_EQ(options.advertise, "");
  EXPECT_GE(options.num_threads, 1);
  EXPECT_EQ(options.max_context, 0);
  EXPECT_EQ(options.max_batch_rows, 0);  // by the backend, known later
  EXPECT_FALSE(options.exit_with_parent);
}

TEST(WorkerOptions, EveryOptionArrives) {
  const WorkerOptions options =
      Good({"--model=m.gguf", "--listen=[::1]:0", "--data-port=9912", "--advertise=node3.lan",
            "--threads=7", "--ctx=4096", "--max-rows=64", "--port-file=p.txt", "--exit-with-parent",
            "--verbose"});
  EXPECT_EQ(options.listen.host, "::1");
  EXPECT_EQ(options.listen.port, 0);
  EXPECT_EQ(options.data_port, 9912);
  EXPECT_EQ(options.advertise, "node3.lan");
  EXPECT_EQ(options.num_threads, 7);
  EXPECT_EQ(options.max_context, 4096);
  EXPECT_EQ(options.max_batch_rows, 64);
  EXPECT_EQ(options.port_file, "p.txt");
  EXPECT_TRUE(options.exit_with_parent);
  EXPECT_TRUE(options.verbose);
}

TEST(WorkerOptions, BadValuesAreNamedWithTheirRange) {
  EXPECT_EQ(ErrorOf({"--model=m", "--threads=0"}),
            "--threads is \"0\", must be a whole number in [1, 1024]");
  EXPECT_EQ(ErrorOf({"--model=m", "--threads=two"}),
            "--threads is \"two\", must be a whole number in [1, 1024]");
  EXPECT_EQ(ErrorOf({"--model=m", "--data-port=65536"}),
            "--data-port is \"65536\", must be a whole number in [0, 65535]");
  EXPECT_EQ(ErrorOf({"--model=m", "--ctx=99999999999999999999"}),
            "--ctx is \"99999999999999999999\", must be a whole number in [1, 1073741824]");
  EXPECT_EQ(ErrorOf({"--model=m", "--max-rows=0"}),
            "--max-rows is \"0\", must be a whole number in [1, 65536]");
  EXPECT_EQ(ErrorOf({"--model=m", "--max-rows=-1"}),
            "--max-rows is \"-1\", must be a whole number in [1, 65536]");
  EXPECT_THAT(ErrorOf({"--model=m", "--listen=localhost"}), HasSubstr("has no port"));
  EXPECT_THAT(ErrorOf({"--model=m", "--listen=localhost:http"}), HasSubstr("port is \"http\""));
  EXPECT_THAT(ErrorOf({"--model=m", "--listen=::1:9911"}), HasSubstr("[address]:port"));
  EXPECT_THAT(ErrorOf({"--model=m", "--advertise=0.0.0.0"}), HasSubstr("peers cannot dial"));
  EXPECT_THAT(ErrorOf({"--model=m", "--listen=a:9911", "--data-port=9911"}),
              HasSubstr("both use port 9911"));
  EXPECT_THAT(ErrorOf({"--model="}), HasSubstr("--model"));
}

TEST(WorkerOptions, EngineOptionsArrive) {
  const WorkerOptions defaults = Good({"--model=m.gguf"});
  EXPECT_EQ(defaults.backend, "auto");
  EXPECT_EQ(defaults.kv_type, "");
  EXPECT_EQ(defaults.replicated_weights, ReplicatedWeights::kAuto);
  EXPECT_EQ(defaults.device_transport, "auto");
  const WorkerOptions options =
      Good({"--synthetic=flash", "--quant=mxfp4", "--layers=4", "--backend=cuda", "--device=3",
            "--kv-type=f32", "--deterministic", "--expert-memory=host", "--replicated-weights=q8_0",
            "--device-transport=push"});
  EXPECT_EQ(options.model_path, "");
  EXPECT_EQ(options.synthetic, "flash");
  EXPECT_EQ(options.quant, "mxfp4");
  EXPECT_EQ(options.synthetic_layers, 4);
  EXPECT_EQ(options.backend, "cuda");
  EXPECT_EQ(options.device, 3);
  EXPECT_EQ(options.kv_type, "f32");
  EXPECT_TRUE(options.deterministic);
  EXPECT_EQ(options.expert_memory, ExpertMemory::kHost);
  EXPECT_EQ(options.replicated_weights, ReplicatedWeights::kQ8_0);
  EXPECT_EQ(options.device_transport, "push");
}

TEST(WorkerOptions, EngineOptionsAreRefusedWithWhatTheyMayBe) {
  EXPECT_EQ(ErrorOf({"--model=m", "--backend=gpu"}),
            "--backend is \"gpu\", must be auto, cpu, cuda");
  EXPECT_EQ(ErrorOf({"--model=m", "--device=-1"}),
            "--device is \"-1\", must be a whole number in [0, 1023]");
  EXPECT_EQ(ErrorOf({"--model=m", "--kv-type=fp8"}), "--kv-type is \"fp8\", must be f32, bf16");
  EXPECT_EQ(ErrorOf({"--model=m", "--expert-memory=disk"}),
            "--expert-memory is \"disk\", must be device, host");
  EXPECT_EQ(ErrorOf({"--model=m", "--replicated-weights=f16"}),
            "--replicated-weights is \"f16\", must be auto, file, q8_0");
  EXPECT_EQ(ErrorOf({"--model=m", "--device-transport=tcp"}),
            "--device-transport is \"tcp\", must be auto, push, nccl, host");
  EXPECT_EQ(ErrorOf({"--synthetic=pro"}), "--synthetic is \"pro\", must be flash, tiny");
  EXPECT_EQ(ErrorOf({"--synthetic=flash", "--quant=q3"}),
            "--quant is \"q3\", must be q2, q4, q8, mxfp4");
  EXPECT_EQ(ErrorOf({"--synthetic=flash", "--layers=0"}),
            "--layers is \"0\", must be a whole number in [1, 256]");
  EXPECT_THAT(ErrorOf({"--model=m", "--synthetic=flash"}), HasSubstr("do not go together"));
  EXPECT_THAT(ErrorOf({"--model=m", "--quant=q4"}), HasSubstr("are for --synthetic"));
}

TEST(WorkerOptions, DevicesAreListedWithoutAnythingElse) {
  EXPECT_TRUE(Good({"--list-devices"}).list_devices);
}

TEST(WorkerOptions, UnknownAndMissingOptionsAreRefused) {
  EXPECT_THAT(ErrorOf({"--model=m", "--modle=n"}), HasSubstr("--modle=n"));
  EXPECT_THAT(ErrorOf({"--model=m", "stray"}), HasSubstr("stray"));
  EXPECT_THAT(ErrorOf({}), HasSubstr("--model is required"));
}

TEST(WorkerOptions, HelpAndVersionNeedNoModel) {
  auto help = Parse({"--help"});
  ASSERT_TRUE(help.ok());
  EXPECT_THAT(std::get<PrintAndExit>(*help).text, HasSubstr("Examples"));
  auto version = Parse({"--version"});
  ASSERT_TRUE(version.ok());
  EXPECT_THAT(std::get<PrintAndExit>(*version).text, HasSubstr("protocol 1"));
}

TEST(ParseHostPort, NoHostMeansAllAddresses) {
  EXPECT_EQ(ParseHostPort(":80")->host, "0.0.0.0");
  EXPECT_EQ(ParseHostPort("*:80")->host, "0.0.0.0");
}

}  // namespace
}  // namespace ds4
