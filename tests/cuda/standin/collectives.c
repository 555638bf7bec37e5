/* A stand-in for NCCL: every rank for itself. Nothing goes from one rank to another.
 *
 * A collective leaves in the receiver what it would hold if all ranks had sent what this one sent, unreduced, and it
 * waits for nobody. Sends and receives do nothing, so a pipeline's stages get no activations from each other. That is
 * enough to see who opens which communicator on which device. Prototypes are written out because nccl.h needs headers
 * that pip's packages lack.
 */
#include "runtime.h"

#include "extras.h"

#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, UNHANDLED_CUDA_ERROR = 1, INTERNAL_ERROR = 3 };

struct communicator {
    int ranks, rank, device;
};
struct unique_id {
    char bytes[128];
};

/* Bytes of an element, by ncclDataType_t. */
static size_t width(int type) {
    switch (type) {
    case 0: case 1: case 10: case 11: return 1; /* int8, uint8, two of float8 */
    case 6: case 9: return 2;                   /* float16, bfloat16 */
    case 4: case 5: case 8: return 8;           /* int64, uint64, float64 */
    default: return 4;
    }
}

static int open_communicator(struct communicator **opened, int ranks, int rank) {
    if (runtime_enter()) return UNHANDLED_CUDA_ERROR;
    int code = DRIVER(standin_failure)("ncclCommInitRank");
    DRIVER(standin_log)("ncclCommInitRank", runtime_device(), rank, code);
    *opened = code ? NULL : malloc(sizeof **opened);
    if (*opened) **opened = (struct communicator){ranks, rank, runtime_device()};
    return code ? code : *opened ? SUCCESS : INTERNAL_ERROR;
}

int ncclGetVersion(int *version) { return *version = 22907, SUCCESS; }
int ncclGetUniqueId(struct unique_id *id) { return memset(id, 1, sizeof *id), SUCCESS; }
int ncclCommInitRank(struct communicator **opened, int ranks, struct unique_id id, int rank) {
    return (void)id, open_communicator(opened, ranks, rank);
}
int ncclCommInitRankConfig(struct communicator **opened, int ranks, struct unique_id id, int rank, void *config) {
    return (void)id, (void)config, open_communicator(opened, ranks, rank);
}
int ncclCommInitRankScalable(
    struct communicator **opened, int ranks, int rank, int id_count, struct unique_id *ids, void *config
) {
    return (void)id_count, (void)ids, (void)config, open_communicator(opened, ranks, rank);
}
/* Who else has this color is not known here; alone, nothing is written beyond a receiver's end. */
int ncclCommSplit(struct communicator *of, int color, int key, struct communicator **opened, void *config) {
    return (void)of, (void)color, (void)key, (void)config, open_communicator(opened, 1, 0);
}
int ncclCommDestroy(struct communicator *closed) { return free(closed), SUCCESS; }
int ncclCommAbort(struct communicator *closed) { return free(closed), SUCCESS; }
int ncclCommCount(struct communicator *of, int *ranks) { return *ranks = of->ranks, SUCCESS; }
int ncclCommUserRank(struct communicator *of, int *rank) { return *rank = of->rank, SUCCESS; }
int ncclCommCuDevice(struct communicator *of, int *device) { return *device = of->device, SUCCESS; }
int ncclCommGetAsyncError(struct communicator *of, int *error) { return (void)of, *error = SUCCESS, SUCCESS; }

const char *ncclGetErrorString(int code) {
    return code == SUCCESS ? "no error" : code == UNHANDLED_CUDA_ERROR ? "unhandled cuda error" : "internal error";
}
const char *ncclGetLastError(struct communicator *of) { return (void)of, ""; }

static int deliver(const void *sent, void *received, size_t bytes) {
    if (runtime_enter()) return UNHANDLED_CUDA_ERROR;
    if (sent && received && sent != received) memmove(received, sent, bytes);
    return SUCCESS;
}

int ncclAllReduce(const void *sent, void *received, size_t count, int type, int operation, struct communicator *among, void *stream) {
    return (void)operation, (void)among, (void)stream, deliver(sent, received, count * width(type));
}
int ncclReduce(const void *sent, void *received, size_t count, int type, int operation, int root, struct communicator *among, void *stream) {
    (void)operation, (void)stream;
    return among->rank == root ? deliver(sent, received, count * width(type)) : deliver(NULL, NULL, 0);
}
int ncclBroadcast(const void *sent, void *received, size_t count, int type, int root, struct communicator *among, void *stream) {
    return (void)root, (void)among, (void)stream, deliver(sent, received, count * width(type));
}
int ncclBcast(void *buffer, size_t count, int type, int root, struct communicator *among, void *stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, among, stream);
}
int ncclAllGather(const void *sent, void *received, size_t count, int type, struct communicator *among, void *stream) {
    (void)stream;
    size_t bytes = count * width(type);
    int code = SUCCESS;
    for (int rank = 0; rank < among->ranks && !code; rank++) code = deliver(sent, (char *)received + (size_t)rank * bytes, bytes);
    return code;
}
int ncclReduceScatter(const void *sent, void *received, size_t count, int type, int operation, struct communicator *among, void *stream) {
    (void)operation, (void)stream;
    size_t bytes = count * width(type);
    return deliver((const char *)sent + (size_t)among->rank * bytes, received, bytes);
}
