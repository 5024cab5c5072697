/*
 * Lamina from inside a guest: the C interface of lamina-shim.
 *
 * Link with liblamina_shim.a (and -lpthread -ldl -lm) or with -llamina_shim.
 *
 * Rules:
 *  - Functions that return int return 0 on success and a negative number on failure; functions that
 *    return a pointer return NULL on failure. lamina_last_error() then says, for the calling
 *    thread, what failed and what to do.
 *  - A null handle or a null pointer is an error, never a crash.
 *  - Strings are UTF-8, ended by a zero byte, and belong to the handle: they are valid until
 *    lamina_refresh() or lamina_close() on it.
 *  - Memory handed out by lamina_map() is valid until lamina_close(). It is shared with the device
 *    and other programs, so its bytes change: read through volatile pointers or copies. Stores are
 *    possible for the view "base" of a handle opened with LAMINA_WRITABLE, and nowhere else:
 *    elsewhere they fault.
 *  - One handle may be used by several threads as long as none of them is in lamina_refresh() or
 *    lamina_close(), which need the handle to themselves.
 */
#ifndef LAMINA_H
#define LAMINA_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* An opened device. */
typedef struct lamina lamina;

/* Flags of lamina_open. */
#define LAMINA_WRITABLE 1u /* map the base window for stores as well */

/* Layouts of a tensor. */
#define LAMINA_LAYOUT_WEIGHT 0u /* elements in address order */
#define LAMINA_LAYOUT_KV 1u     /* token-major rows of kv_channels elements, in windows of kv_window tokens */

typedef struct lamina_tensor {
    const char *name;
    const char *shape;  /* outermost dimension first, for example "512x64" */
    const char *format; /* for example "bf16" */
    uint64_t dpa;       /* offset in the base window, bytes */
    uint64_t length;    /* bytes */
    uint64_t elements;
    uint32_t layout;
    uint32_t kv_channels;
    uint32_t kv_window;
} lamina_tensor;

typedef struct lamina_view {
    const char *spelling; /* for example "e8m3" */
    uint64_t tensor;      /* index of its tensor */
    uint64_t offset;      /* in the views window, bytes */
    uint64_t length;      /* bytes */
    uint64_t elements;
    uint32_t bits;        /* bits of an element */
    int32_t scale_exp;    /* a stored x stands for x * 2^scale_exp */
} lamina_view;

/* Makes CXL regions and devdax devices where there are none (`lamina-shim up`); needs root. */
int lamina_up(void);

/*
 * Opens the device. base and views are paths of the two windows, or both NULL: then LAMINA_BASE and
 * LAMINA_VIEWS, then sysfs. With views alone there is no base window. flags: 0 or LAMINA_WRITABLE.
 */
lamina *lamina_open(const char *base, const char *views, unsigned flags);

/* Ends all mappings of the handle. NULL does nothing. */
void lamina_close(lamina *handle);

/*
 * Reads the directory again, for example after a view was made. Mapped memory stays valid, strings
 * do not.
 */
int lamina_refresh(lamina *handle);

/*
 * Tensors and views that there are; 0 with a null handle. The directory has room for a few ten
 * thousand: where there are more, lamina_open() and lamina_refresh() ask the control port for them.
 */
size_t lamina_tensor_count(const lamina *handle);
size_t lamina_view_count(const lamina *handle);

/*
 * 1 if there are more tensors or views than the directory has room for and no control port told of
 * them: then they are not counted, and lamina_map() does not know them. Else 0; -1 with a null
 * handle.
 */
int lamina_is_incomplete(const lamina *handle);

/* Describes the tensor or view number index, counted from 0. */
int lamina_tensor_info(const lamina *handle, size_t index, lamina_tensor *out);
int lamina_view_info(const lamina *handle, size_t index, lamina_view *out);

/*
 * The memory of a view of a tensor, by the view's spelling; "base" is the tensor itself. *address
 * and *length (bytes) are set on success and left alone on failure.
 */
int lamina_map(const lamina *handle, const char *tensor, const char *view, void **address, size_t *length);

/*
 * Makes stores to length bytes at offset of the base window, made before the call, visible to reads
 * of views after it. length 0 means everything.
 */
int lamina_flush(const lamina *handle, uint64_t offset, uint64_t length);

/*
 * Where hosts share a region without coherence: drops what this host holds of length bytes at
 * offset of the base window, and of views over them, so that the next loads see what other hosts
 * have flushed. What this host stored into these pages is flushed first. Memory handed out stays
 * valid. Elsewhere this does nothing. length 0 means everything.
 */
int lamina_invalidate(const lamina *handle, uint64_t offset, uint64_t length);

/*
 * Tensors and views of this guest's own partition of the device. Each call is done when it returns;
 * lamina_refresh() then shows it.
 *
 * lamina_tensor_add makes a tensor where it fits, over bytes that stay; kv_channels 0 means no KV
 * cache, kv_window is in tokens. lamina_tensor_resize makes it longer or shorter where it is.
 * lamina_tensor_remove removes it with its views; its bytes stay, as bytes of nobody. Memory handed
 * out of a view that was removed stays mapped and reads as zeros, or as another view that came
 * there.
 */
int lamina_tensor_add(const lamina *handle, const char *tensor, uint64_t length, const char *format, uint32_t kv_channels,
                      uint32_t kv_window);

/*
 * A tensor to be made: as lamina_tensor_add, and what else may be said. What is 0 or NULL is not
 * said.
 */
typedef struct lamina_new_tensor {
    const char *name;
    const char *format; /* for example "bf16" */
    uint64_t length;    /* bytes */
    uint32_t kv_channels;
    uint32_t kv_window;
    const char *codec; /* of its planes, for example "zstd" */
    const char *lossy; /* full windows of a KV cache are coded with loss: "packkv", "packkv:0.1,median,8" */
    const char *base;  /* a tensor that its blocks may be stored as differences to */
} lamina_new_tensor;

/* Makes a tensor where it fits, over bytes that stay. */
int lamina_tensor_make(const lamina *handle, const lamina_new_tensor *tensor);
/* Stores a tensor that has a base by itself, so that it needs none. */
int lamina_tensor_detach(const lamina *handle, const char *tensor);
int lamina_tensor_resize(const lamina *handle, const char *tensor, uint64_t length);
int lamina_tensor_remove(const lamina *handle, const char *tensor);
int lamina_view_add(const lamina *handle, const char *tensor, const char *view);
int lamina_view_remove(const lamina *handle, const char *tensor, const char *view);

/*
 * What last failed on this thread; "" if nothing did. Valid until the next failure on this thread.
 * Never NULL.
 */
const char *lamina_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* LAMINA_H */
