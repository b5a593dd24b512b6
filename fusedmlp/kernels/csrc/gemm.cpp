// cuBLASLt is column-major: it computes D^T (N, M) = B^T (N, K) @ A^T (K, M). A row-major matrix is its transpose
// there, so cuBLASLt's first operand is our B, its second one is our A, and its rows, along which a bias lies, are our
// columns.
#include "gemm.h"

#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "measure.h"

namespace fusedmlp {
namespace {

constexpr int kCandidates = 8;
constexpr size_t kMostWorkspace = size_t{32} << 20;

void check(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw std::runtime_error(std::string("cuBLASLt: ") + what + " failed: " + cublasLtGetStatusString(status));
}

template <auto kDestroy>
struct Destroy {
  template <typename Handle>
  void operator()(Handle* handle) const {
    kDestroy(handle);
  }
};
using Desc = std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy<cublasLtMatmulDescDestroy>>;
using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy<cublasLtMatrixLayoutDestroy>>;
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, Destroy<cublasLtMatmulPreferenceDestroy>>;

template <typename V>
void set(const Desc& desc, cublasLtMatmulDescAttributes_t attribute, const V& value) {
  check(cublasLtMatmulDescSetAttribute(desc.get(), attribute, &value, sizeof(value)), "MatmulDescSetAttribute");
}

template <typename V>
void set(const Preference& preference, cublasLtMatmulPreferenceAttributes_t attribute, const V& value) {
  check(cublasLtMatmulPreferenceSetAttribute(preference.get(), attribute, &value, sizeof(value)),
        "MatmulPreferenceSetAttribute");
}

cudaDataType_t cuda_type(Dtype dtype) {
  switch (dtype) {
    case Dtype::kFloat32:
      return CUDA_R_32F;
    case Dtype::kFloat16:
      return CUDA_R_16F;
    case Dtype::kBFloat16:
      return CUDA_R_16BF;
  }
  throw std::runtime_error("unknown dtype");
}

cublasLtEpilogue_t lt_epilogue(Epilogue epilogue) {
  switch (epilogue) {
    case Epilogue::kNone:
      return CUBLASLT_EPILOGUE_DEFAULT;
    case Epilogue::kBias:
      return CUBLASLT_EPILOGUE_BIAS;
    case Epilogue::kGelu:
      return CUBLASLT_EPILOGUE_GELU;
    case Epilogue::kGeluBias:
      return CUBLASLT_EPILOGUE_GELU_BIAS;
    case Epilogue::kGeluAux:
      return CUBLASLT_EPILOGUE_GELU_AUX;
    case Epilogue::kGeluAuxBias:
      return CUBLASLT_EPILOGUE_GELU_AUX_BIAS;
    case Epilogue::kDGelu:
      return CUBLASLT_EPILOGUE_DGELU;
    case Epilogue::kDGeluSums:
      return CUBLASLT_EPILOGUE_DGELU_BGRAD;
    case Epilogue::kRowSums:
      // Our A is its B.
      return CUBLASLT_EPILOGUE_BGRADB;
  }
  throw std::runtime_error("unknown epilogue");
}

// Largest power of two, up to 256, that divides an address.
uint32_t alignment(const void* pointer) {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  uint32_t bytes = 256;
  while (address % bytes != 0) bytes /= 2;
  return bytes;
}

Layout layout_of(const Matrix& matrix, int64_t rows, int64_t columns, cudaDataType_t type) {
  cublasLtMatrixLayout_t layout = nullptr;
  const auto lt_rows = static_cast<uint64_t>(matrix.transposed ? rows : columns);
  const auto lt_columns = static_cast<uint64_t>(matrix.transposed ? columns : rows);
  check(cublasLtMatrixLayoutCreate(&layout, type, lt_rows, lt_columns, matrix.ld), "MatrixLayoutCreate");
  return Layout(layout);
}

Desc desc_of(const Product& p) {
  const bool tf32 = p.dtype == Dtype::kFloat32 && p.tf32;
  cublasLtMatmulDesc_t created = nullptr;
  check(cublasLtMatmulDescCreate(&created, tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F),
        "MatmulDescCreate");
  Desc desc(created);
  set(desc, CUBLASLT_MATMUL_DESC_TRANSA, p.b.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(desc, CUBLASLT_MATMUL_DESC_TRANSB, p.a.transposed ? CUBLAS_OP_T : CUBLAS_OP_N);
  set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE, lt_epilogue(p.epilogue));
  if (p.bias != nullptr) set(desc, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
  if (has_aux(p.epilogue)) {
    set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, p.aux);
    set(desc, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, p.N);
  }
  return desc;
}

// A product as cuBLASLt wants it.
struct Described {
  Desc desc;
  Layout a, b, d;
};

Described describe(const Product& p) {
  const cudaDataType_t type = cuda_type(p.dtype);
  return {desc_of(p), layout_of(p.b, p.K, p.N, type), layout_of(p.a, p.M, p.K, type),
          layout_of({p.d, p.N, false}, p.M, p.N, type)};
}

struct Algorithm {
  cublasLtMatmulAlgo_t algo;
  size_t workspace_bytes;
};

// What is remembered of a problem: its algorithm, or that there is none.
using Plan = std::optional<Algorithm>;

std::vector<Algorithm> heuristic(const Product& p, const Described& described, const LtContext& context) {
  cublasLtMatmulPreference_t created = nullptr;
  check(cublasLtMatmulPreferenceCreate(&created), "MatmulPreferenceCreate");
  const Preference preference(created);
  set(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{kMostWorkspace});
  // Parts of a split K are added in fp32, in a fixed order.
  set(preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE});
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, alignment(p.b.data));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, alignment(p.a.data));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, alignment(p.d));
  set(preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, alignment(p.d));
  cublasLtMatmulHeuristicResult_t results[kCandidates] = {};
  int count = 0;
  const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(context.handle, described.desc.get(), described.a.get(),
                                                               described.b.get(), described.d.get(), described.d.get(),
                                                               preference.get(), kCandidates, results, &count);
  std::vector<Algorithm> algorithms;
  if (status != CUBLAS_STATUS_SUCCESS && status != CUBLAS_STATUS_NOT_SUPPORTED) check(status, "MatmulAlgoGetHeuristic");
  for (int i = 0; i < count; ++i) {
    if (results[i].state == CUBLAS_STATUS_SUCCESS) algorithms.push_back({results[i].algo, results[i].workspaceSize});
  }
  return algorithms;
}

cublasStatus_t enqueue(const Product& p, const Described& described, const Algorithm& algorithm,
                       const LtContext& context) {
  const float one = 1.0f, zero = 0.0f;
  void* workspace = algorithm.workspace_bytes > 0 ? context.workspace(algorithm.workspace_bytes) : nullptr;
  return cublasLtMatmul(context.handle, described.desc.get(), &one, p.b.data, described.a.get(), p.a.data,
                        described.b.get(), &zero, p.d, described.d.get(), p.d, described.d.get(), &algorithm.algo,
                        workspace, algorithm.workspace_bytes, context.stream);
}

using Plans = Answers<Plan, 18>;

Plans::Key key_of(const Product& p, const LtContext& context) {
  const auto number = [](auto value) { return static_cast<int64_t>(value); };
  return {context.device,
          context.measure,
          number(p.dtype),
          p.tf32,
          number(p.epilogue),
          p.M,
          p.N,
          p.K,
          p.a.ld,
          p.a.transposed,
          p.b.ld,
          p.b.transposed,
          p.bias != nullptr,
          alignment(p.a.data),
          alignment(p.b.data),
          alignment(p.d),
          alignment(p.bias),
          alignment(p.aux)};
}

Plan find_plan(const Product& p, const Described& described, const LtContext& context, bool measure) {
  const std::vector<Algorithm> candidates = heuristic(p, described, context);
  if (candidates.empty()) return std::nullopt;
  if (!measure) return candidates.front();
  const auto choice = fastest(context.stream, candidates.size(), [&](size_t i) {
    return enqueue(p, described, candidates[i], context) == CUBLAS_STATUS_SUCCESS;
  });
  return choice ? Plan(candidates[*choice]) : std::nullopt;
}

}  // namespace

bool run_product(const Product& product, const LtContext& context) {
  static Plans plans;
  if (!fits(product)) return false;
  const Described described = describe(product);
  const Plans::Key key = key_of(product, context);
  std::optional<Plan> plan = plans.find(key);
  if (!plan) {
    const bool capturing = is_capturing(context.stream);
    plan = find_plan(product, described, context, context.measure && !capturing && !plans.is_full());
    // What a capture kept from being measured is measured at the next call outside of one.
    if (!context.measure || !capturing) plan = plans.keep(key, *plan);
  }
  if (!*plan) return false;
  check(enqueue(product, described, **plan, context), "Matmul");
  return true;
}

}  // namespace fusedmlp
