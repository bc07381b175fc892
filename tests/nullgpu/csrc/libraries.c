/* cuBLAS, cuBLASLt and cuDNN: products count their FLOPs; cuDNN offers one engine without a workspace. */
#include "nullgpu.h"

/* ---- cuBLAS ---- */

enum { FP32 = 0, BF16_OR_FP16 = 2 }; /* cudaDataType: 0 is fp32, 2 is fp16; every other type counts as 16 bits */

static int gemm(int dtype, double m, double n, double k, double batch) {
    record_launch(dtype == FP32 ? GEMM_FP32_KERNEL : GEMM_16BIT_KERNEL);
    count(dtype == FP32 ? GEMM_FP32 : GEMM_16BIT, 1);
    count(GEMM_FLOP, 2 * m * n * k * batch);
    return 0;
}

static int math_mode;
API int cublasCreate_v2(void **out) { *out = new_handle(); return 0; }
API int cublasLtCreate(void **out) { *out = new_handle(); return 0; }
API int cublasSetMathMode(void *handle, int mode) { (void)handle; math_mode = mode; return 0; }
API int cublasGetMathMode(void *handle, int *mode) { (void)handle; *mode = math_mode; return 0; }
API int cublasGetPointerMode_v2(void *handle, int *mode) { (void)handle; *mode = 0; return 0; }
API int cublasGetVersion_v2(void *handle, int *version) { (void)handle; *version = REPORTED_CUDA_VERSION * 10; return 0; }
API const char *cublasGetStatusString(int status) { (void)status; return "null GPU"; }

API int cublasSgemm_v2(void *handle, int ta, int tb, int m, int n, int k) {
    (void)handle; (void)ta; (void)tb;
    return gemm(FP32, m, n, k, 1);
}
API int cublasSgemmEx(void *handle, int ta, int tb, int m, int n, int k) {
    (void)handle; (void)ta; (void)tb;
    return gemm(BF16_OR_FP16, m, n, k, 1);
}
API int cublasGemmEx(void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int a_type) {
    (void)handle; (void)ta; (void)tb; (void)alpha; (void)a;
    return gemm(a_type, m, n, k, 1);
}
API int cublasSgemmStridedBatched(
    void *handle, int ta, int tb, int m, int n, int k, const float *alpha, const float *a, int lda, long long stride_a,
    const float *b, int ldb, long long stride_b, const float *beta, float *c, int ldc, long long stride_c, int batch) {
    (void)handle; (void)ta; (void)tb; (void)alpha; (void)a; (void)lda; (void)stride_a; (void)b; (void)ldb; (void)stride_b;
    (void)beta; (void)c; (void)ldc; (void)stride_c;
    return gemm(FP32, m, n, k, batch);
}
API int cublasGemmStridedBatchedEx(
    void *handle, int ta, int tb, int m, int n, int k, const void *alpha, const void *a, int a_type, int lda,
    long long stride_a, const void *b, int b_type, int ldb, long long stride_b, const void *beta, void *c, int c_type,
    int ldc, long long stride_c, int batch) {
    (void)handle; (void)ta; (void)tb; (void)alpha; (void)a; (void)lda; (void)stride_a; (void)b; (void)b_type; (void)ldb;
    (void)stride_b; (void)beta; (void)c; (void)c_type; (void)ldc; (void)stride_c;
    return gemm(a_type, m, n, k, batch);
}

/* ---- cuBLASLt: its opaque layouts are ours, so that a product knows its sizes ---- */

typedef struct { int dtype; double rows, cols, batch; } Layout;
#define BATCH_COUNT 5 /* CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT */

API int cublasLtMatrixLayoutCreate(Layout **out, int dtype, uint64_t rows, uint64_t cols) {
    *out = new_handle();
    (*out)->dtype = dtype, (*out)->rows = rows, (*out)->cols = cols, (*out)->batch = 1;
    return 0;
}
API int cublasLtMatrixLayoutSetAttribute(Layout *layout, int attribute, const void *value, size_t bytes) {
    if (attribute == BATCH_COUNT && bytes == 4) layout->batch = *(const int32_t *)value;
    return 0;
}
API int cublasLtMatrixLayoutDestroy(Layout *layout) { free(layout); return 0; }
API int cublasLtMatmulDescCreate(void **out) { *out = new_handle(); return 0; }
API int cublasLtMatmulDescDestroy(void *descriptor) { free(descriptor); return 0; }
API int cublasLtMatmulPreferenceCreate(void **out) { *out = new_handle(); return 0; }
API int cublasLtMatmulPreferenceDestroy(void *preference) { free(preference); return 0; }
API int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *descriptor, void *a, void *b, void *c, void *d, void *preference, int requested, char *results,
    int *returned) {
    (void)handle; (void)descriptor; (void)a; (void)b; (void)c; (void)d; (void)preference; (void)requested;
    memset(results, 0, 96); /* sizeof(cublasLtMatmulHeuristicResult_t): an algorithm, no workspace, status 0 */
    *returned = 1;
    return 0;
}
API int cublasLtMatmul(
    void *handle, void *descriptor, const void *alpha, const void *a, Layout *layout_a, const void *b, Layout *layout_b,
    const void *beta, const void *c, Layout *layout_c, void *d, Layout *layout_d) {
    (void)handle; (void)descriptor; (void)alpha; (void)a; (void)b; (void)layout_b; (void)beta; (void)c; (void)layout_c; (void)d;
    double inner = layout_a->rows * layout_a->cols / (layout_d->rows ? layout_d->rows : 1);
    return gemm(layout_a->dtype, layout_d->rows, layout_d->cols, inner, layout_d->batch);
}

/* ---- cuDNN ---- */

static int run_cudnn(void) { count(CUDNN, 1); return record_launch(CUDNN_KERNEL); }

API size_t cudnnGetVersion(void) { return REPORTED_CUDNN_VERSION; }
API int cudnnGetProperty(int property, int *value) { /* libraryPropertyType: major, minor, patch */
    int version = REPORTED_CUDNN_VERSION;
    *value = property == 0 ? version / 10000 : property == 1 ? version / 100 % 100 : version % 100;
    return 0;
}
API size_t cudnnGetCudartVersion(void) { return REPORTED_CUDA_VERSION; }
API const char *cudnnGetErrorString(int status) { (void)status; return "null GPU"; }
API void cudnnGetLastErrorString(char *out, size_t size) { if (size) *out = 0; }
API int cudnnCreate(void **out) { *out = new_handle(); return 0; }
API int cudnnGetStream(void *handle, void **out) { (void)handle; *out = 0; return 0; }

/* Backend API: attributes and attribute types by their numbers in cudnn_graph.h. */
#define ENGINEHEUR_RESULTS 202
enum { TYPE_BOOLEAN = 2, TYPE_NUMERICAL_NOTE = 11, TYPE_DESCRIPTOR = 15, TYPE_BEHAVIOR_NOTE = 19, TYPE_INT32 = 23, TYPE_CHAR = 24 };

API int cudnnBackendCreateDescriptor(int type, void **out) { (void)type; *out = new_handle(); return 0; }
API int cudnnBackendGetAttribute(void *descriptor, int name, int type, int64_t requested, int64_t *returned, void *out) {
    (void)descriptor;
    int64_t n = requested > 0;
    if (name == ENGINEHEUR_RESULTS) n = 1; /* the caller made the descriptors */
    else if (type == TYPE_NUMERICAL_NOTE || type == TYPE_BEHAVIOR_NOTE || type == TYPE_CHAR) n = 0;
    else if (out && n && type != TYPE_DESCRIPTOR) memset(out, 0, type == TYPE_INT32 ? 4 : type == TYPE_BOOLEAN ? 1 : 8);
    if (returned) *returned = n;
    return 0;
}
API int cudnnBackendExecute(void) { return run_cudnn(); }

API int cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize(
    void *handle, int mode, int ops, void *x, void *z, void *y, void *bn, void *activation, size_t *bytes) {
    (void)handle; (void)mode; (void)ops; (void)x; (void)z; (void)y; (void)bn; (void)activation;
    *bytes = 0;
    return 0;
}
API int cudnnGetBatchNormalizationBackwardExWorkspaceSize(
    void *handle, int mode, int ops, void *x, void *y, void *dy, void *dz, void *dx, void *bn, void *activation, size_t *bytes) {
    (void)handle; (void)mode; (void)ops; (void)x; (void)y; (void)dy; (void)dz; (void)dx; (void)bn; (void)activation;
    *bytes = 0;
    return 0;
}
API int cudnnGetBatchNormalizationTrainingExReserveSpaceSize(
    void *handle, int mode, int ops, void *activation, void *x, size_t *bytes) {
    (void)handle; (void)mode; (void)ops; (void)activation; (void)x;
    *bytes = 0;
    return 0;
}
API int cudnnDropoutGetStatesSize(void *handle, size_t *bytes) { (void)handle; *bytes = 0; return 0; }
API int cudnnBatchNormalizationForwardTrainingEx(void) { return run_cudnn(); }
API int cudnnBatchNormalizationForwardInference(void) { return run_cudnn(); }
API int cudnnBatchNormalizationBackwardEx(void) { return run_cudnn(); }
API int cudnnConvolutionForward(void) { return run_cudnn(); }
API int cudnnConvolutionBackwardData(void) { return run_cudnn(); }
API int cudnnConvolutionBackwardFilter(void) { return run_cudnn(); }
API int cudnnConvolutionBiasActivationForward(void) { return run_cudnn(); }
