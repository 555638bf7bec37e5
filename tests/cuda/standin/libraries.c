/* Stand-ins for cuBLAS, cuSOLVER and cuSPARSE, as far as they must give something back: handles that are not NULL.
 *
 * Their other functions return 0 and do nothing (build.py). Prototypes are written out, since their headers need
 * headers that pip's packages lack.
 */
#include "runtime.h"

#include "extras.h"

#include <string.h>

static char handle[4096]; /* nothing looks into it */

/* cuBLAS says CUBLAS_STATUS_NOT_INITIALIZED (1) where its context does not come about, for want of memory above all. */
int cublasCreate_v2(void **created) {
    int error = runtime_enter();
    if (error) return 1;
    error = DRIVER(standin_failure)("cublasCreate");
    if (!error) *created = handle;
    return error;
}
int cublasGetVersion_v2(void *of, int *version) { return (void)of, *version = 130100, 0; }

int cublasLtCreate(void **created) { return *created = handle, 0; }
int cublasLtMatmulDescCreate(void **created, int compute_type, int scale_type) {
    return (void)compute_type, (void)scale_type, *created = handle, 0;
}
int cublasLtMatrixLayoutCreate(void **created, int type, unsigned long long rows, unsigned long long columns, long long ld) {
    return (void)type, (void)rows, (void)columns, (void)ld, *created = handle, 0;
}
int cublasLtMatmulPreferenceCreate(void **created) { return *created = handle, 0; }

/* torch takes no algorithm for an error. The layout is cublasLtMatmulHeuristicResult_t's (cublasLt.h). */
struct heuristic {
    unsigned long long algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
};
int cublasLtMatmulAlgoGetHeuristic(
    void *of, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted,
    struct heuristic *results, int *found
) {
    (void)of, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference, (void)wanted;
    memset(results, 0, sizeof *results);
    *found = 1;
    return 0;
}

int cusolverDnCreate(void **created) { return *created = handle, 0; }
int cusparseCreate(void **created) { return *created = handle, 0; }
