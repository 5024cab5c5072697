/*
 * The C interface, used as a C program would. Arguments: base, views. Prints every view; then
 * misuses everything.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "lamina.h"

#define CHECK(condition)                                                                                                 \
    do {                                                                                                                 \
        if (!(condition)) {                                                                                              \
            fprintf(stderr, "line %d: %s is false (last error: %s)\n", __LINE__, #condition, lamina_last_error());       \
            exit(1);                                                                                                     \
        }                                                                                                                \
    } while (0)

static uint64_t fnv(const volatile unsigned char *bytes, size_t length)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < length; i++)
        hash = (hash ^ bytes[i]) * 0x100000001b3u;
    return hash;
}

static void print(lamina *handle, const char *tensor, const char *view)
{
    void *address = NULL;
    size_t length = 0;
    CHECK(lamina_map(handle, tensor, view, &address, &length) == 0);
    printf("%s %s %zu %016llx\n", tensor, view, length, (unsigned long long)fnv(address, length));
}

int main(int argc, char **argv)
{
    CHECK(argc == 3);
    CHECK(strcmp(lamina_last_error(), "") == 0);
    lamina *handle = lamina_open(argv[1], argv[2], LAMINA_WRITABLE);
    CHECK(handle != NULL);

    lamina_tensor tensor;
    lamina_view view;
    CHECK(lamina_tensor_count(handle) == 2);
    for (size_t i = 0; i < lamina_tensor_count(handle); i++) {
        CHECK(lamina_tensor_info(handle, i, &tensor) == 0);
        CHECK(strcmp(tensor.format, "bf16") == 0);
        CHECK(tensor.length == tensor.elements * 2);
        print(handle, tensor.name, "base");
    }
    CHECK(tensor.layout == LAMINA_LAYOUT_KV && tensor.kv_channels == 32 && tensor.kv_window == 16);
    for (size_t i = 0; i < lamina_view_count(handle); i++) {
        CHECK(lamina_view_info(handle, i, &view) == 0);
        CHECK(lamina_tensor_info(handle, view.tensor, &tensor) == 0);
        CHECK(view.elements == tensor.elements && view.bits >= 12 && view.scale_exp == 0);
        print(handle, tensor.name, view.spelling);
    }

    /* A store, and the fence behind it. */
    void *address = NULL;
    size_t length = 0;
    CHECK(lamina_map(handle, "kv", "base", &address, &length) == 0);
    memcpy((char *)address + 3, "stored", 6);
    CHECK(lamina_flush(handle, 0, 0) == 0);
    CHECK(lamina_flush(handle, 4096, 10) == 0);
    CHECK(lamina_invalidate(handle, 8192, 64) == 0);
    CHECK(lamina_invalidate(handle, 0, 0) == 0);
    CHECK(lamina_tensor_add(handle, "mine", 8192, "bf16", 64, 128) == 0);
    CHECK(lamina_tensor_resize(handle, "mine", 4096) == 0);
    CHECK(lamina_view_add(handle, "mine", "e8m3") == 0);
    CHECK(lamina_view_remove(handle, "mine", "e8m3") == 0);
    CHECK(lamina_tensor_remove(handle, "mine") == 0);
    lamina_new_tensor new_tensor = {.name = "tuned", .format = "bf16", .length = 8192, .base = "w"};
    CHECK(lamina_tensor_make(handle, &new_tensor) == 0);
    CHECK(lamina_tensor_detach(handle, "tuned") == 0);
    lamina_new_tensor cache = {"cache", "bf16", 8192, 64, 64, "zstd", "packkv:0.1,median,8", NULL};
    CHECK(lamina_tensor_make(handle, &cache) == 0);
    CHECK(lamina_refresh(handle) == 0);
    CHECK(lamina_tensor_info(handle, 0, &tensor) == 0 && strcmp(tensor.name, "w") == 0);

    /* Misuse: errors, and results left alone. */
    void *untouched = &tensor;
    length = 77;
    CHECK(lamina_map(handle, "nope", "full", &untouched, &length) < 0);
    CHECK(strstr(lamina_last_error(), "nope") != NULL);
    CHECK(lamina_map(handle, "w", "e1m1", &untouched, &length) < 0);
    CHECK(strstr(lamina_last_error(), "e1m1") != NULL);
    CHECK(lamina_map(handle, "\xff\xfe", "full", &untouched, &length) < 0);
    CHECK(untouched == &tensor && length == 77);
    CHECK(lamina_map(handle, NULL, "full", &untouched, &length) < 0);
    CHECK(lamina_map(handle, "w", NULL, &untouched, &length) < 0);
    CHECK(lamina_map(handle, "w", "full", NULL, &length) < 0);
    CHECK(lamina_map(handle, "w", "full", &untouched, NULL) < 0);
    CHECK(lamina_map(NULL, "w", "full", &untouched, &length) < 0);
    CHECK(strstr(lamina_last_error(), "NULL") != NULL);
    CHECK(lamina_tensor_info(handle, 2, &tensor) < 0);
    CHECK(lamina_tensor_info(handle, (size_t)-1, &tensor) < 0);
    CHECK(lamina_tensor_info(handle, 0, NULL) < 0);
    CHECK(lamina_tensor_info(NULL, 0, &tensor) < 0);
    CHECK(lamina_view_info(handle, 4, &view) < 0);
    CHECK(lamina_view_info(handle, 0, NULL) < 0);
    CHECK(lamina_view_info(NULL, 0, &view) < 0);
    CHECK(lamina_tensor_count(NULL) == 0 && lamina_view_count(NULL) == 0);
    CHECK(lamina_is_incomplete(NULL) == -1 && lamina_is_incomplete(handle) == 0);
    CHECK(lamina_flush(NULL, 0, 0) < 0);
    CHECK(lamina_invalidate(NULL, 0, 0) < 0);
    CHECK(lamina_tensor_add(NULL, "mine", 1, "bf16", 0, 0) < 0);
    CHECK(lamina_tensor_add(handle, NULL, 1, "bf16", 0, 0) < 0);
    CHECK(lamina_tensor_add(handle, "mine", 1, NULL, 0, 0) < 0);
    CHECK(lamina_tensor_make(NULL, &cache) < 0 && lamina_tensor_make(handle, NULL) < 0);
    CHECK(strstr(lamina_last_error(), "NULL") != NULL);
    new_tensor.name = NULL;
    CHECK(lamina_tensor_make(handle, &new_tensor) < 0);
    cache.lossy = "\xff\xfe";
    CHECK(lamina_tensor_make(handle, &cache) < 0);
    CHECK(strstr(lamina_last_error(), "lossy") != NULL);
    CHECK(lamina_tensor_detach(handle, NULL) < 0 && lamina_tensor_detach(NULL, "mine") < 0);
    CHECK(lamina_tensor_resize(handle, NULL, 1) < 0 && lamina_tensor_remove(handle, NULL) < 0);
    CHECK(lamina_view_add(handle, "mine", NULL) < 0 && lamina_view_remove(handle, NULL, "full") < 0);
    CHECK(lamina_refresh(NULL) < 0);
    CHECK(lamina_open(argv[1], argv[2], 6) == NULL);
    CHECK(strstr(lamina_last_error(), "0x6") != NULL);
    CHECK(lamina_open(argv[1], NULL, 0) == NULL);
    CHECK(lamina_open(argv[1], "/missing", 0) == NULL);
    CHECK(strstr(lamina_last_error(), "/missing") != NULL);
    CHECK(lamina_open(argv[2], argv[1], 0) == NULL);
    lamina_close(NULL);
    lamina_close(handle);
    return 0;
}
