// ds4-gguf: looks into model files, checks them, and makes them from Hugging Face checkpoints.
#include <CLI/CLI.hpp>
#include <iostream>
#include <string>
#include <vector>

#include "engine/gguf/convert.h"
#include "engine/gguf/gguf_reader.h"
#include "engine/tools/gguf_check.h"
#include "engine/tools/gguf_inspect.h"

namespace ds4 {
namespace {

constexpr char kExamples[] = R"(Examples
  ds4-gguf inspect model.gguf                  metadata, tensors, totals
  ds4-gguf inspect --json model.gguf | jq '.tensors | length'
  ds4-gguf check model.gguf                    reads everything; says ok or what is wrong
  ds4-gguf convert --in model.safetensors --tokenizer tokenizer.json --type q8_0 --out model.gguf
  ds4-gguf convert --in part-0.safetensors --in part-1.safetensors --type f32 --out exact.gguf

Exit status: 0 done, 1 the file is not right or cannot be read, 2 wrong usage.)";

struct Options {
  std::string file;
  bool json = false;
  std::string type = "q8_0";
  ConvertOptions convert;
};

Status Inspect(const Options& options) {
  ASSIGN_OR_RETURN(const auto file, GgufFile::Open(options.file, GgufContent::kDirectory));
  if (options.json) {
    PrintFileJson(*file, std::cout);
  } else {
    PrintFile(*file, std::cout);
  }
  return OkStatus();
}

Status Check(const std::string& path) {
  ASSIGN_OR_RETURN(const auto file, GgufFile::Open(path));
  return CheckModelFile(*file, std::cout, std::cerr);
}

Status Convert(Options options) {
  const auto type = DTypeFromName(options.type);
  if (!type) return InvalidArgumentError("unknown type " + options.type);
  options.convert.type = *type;
  options.convert.report = [](const std::string& line) { std::cerr << line << "\n"; };
  RETURN_IF_ERROR(ConvertSafetensors(options.convert));
  // The converter knows names, not shapes; what was written must also load.
  return Check(options.convert.output);
}

int Exit(const Status& status) {
  if (status.ok()) return 0;
  std::cerr << "ds4-gguf: " << status.message() << "\n";
  return 1;
}

int Main(int argc, char** argv) {
  CLI::App app("Looks into GGUF model files, checks them, and converts checkpoints to GGUF.");
  app.footer(kExamples);
  app.require_subcommand(1);
  Options options;

  auto* inspect = app.add_subcommand("inspect", "Print metadata, tensor table and totals by type");
  inspect->add_option("file", options.file, "GGUF file; its data may be missing")->required();
  inspect->add_flag("--json", options.json, "One JSON object instead of text");

  auto* check = app.add_subcommand(
      "check", "Read everything: finite scales, all tensors there, right shapes");
  check->add_option("file", options.file, "GGUF file")->required();

  auto* convert = app.add_subcommand(
      "convert", "Make a GGUF file from safetensors with Hugging Face names, then check it");
  convert->add_option("--in", options.convert.inputs, "Safetensors file; repeat for several pieces")
      ->required();
  convert->add_option("--out", options.convert.output, "GGUF file; appears when it is complete")
      ->required();
  convert->add_option("--tokenizer", options.convert.tokenizer,
                      "tokenizer.json; without it the file holds no tokenizer");
  convert->add_option("--type", options.type, "Type of large matrices: q8_0, f16, bf16 or f32")
      ->capture_default_str()
      ->check(CLI::IsMember({"q8_0", "f16", "bf16", "f32"}));
  convert->add_option("--name", options.convert.name, "Name of the model, shown to users")
      ->capture_default_str();

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }
  if (inspect->parsed()) return Exit(Inspect(options));
  if (check->parsed()) return Exit(Check(options.file));
  return Exit(Convert(options));
}

}  // namespace
}  // namespace ds4

int main(int argc, char** argv) { return ds4::Main(argc, argv); }
