/* SPDX-License-Identifier: GPL-2.0-only OR Apache-2.0 */
/*
 * What driver and device say to each other; docs/shmem.md has the rules.
 * Everything is little-endian.
 */
#ifndef LAMINA_PROTOCOL_H
#define LAMINA_PROTOCOL_H

#include <linux/types.h>

/* ioMemory, which the standard names and leaves undefined. */
#define LAMINA_VIRTIO_ID	6
#define LAMINA_MAGIC		0x4d53414e494d414cULL	/* "LAMINASM" */
#define LAMINA_PROTOCOL_VERSION	1
/* The shared-memory region with the mappings. */
#define LAMINA_REGION		0

/* The configuration space. */
struct lamina_config {
	__le64 magic;
	__le64 version;
	__le64 base_bytes;
	__le64 views_bytes;
};

enum lamina_op {
	LAMINA_OP_RESET = 1,
	LAMINA_OP_MAP = 2,
	LAMINA_OP_UNMAP = 3,
	LAMINA_OP_FLUSH = 4,
	LAMINA_OP_ASK = 5,
	LAMINA_OP_MORE = 6,
};

/* Text follows LAMINA_OP_ASK. */
struct lamina_request {
	__le32 op;
	__le32 window;
	__le64 offset;
	__le64 length;
	__le64 at;
};

enum lamina_status {
	LAMINA_OK = 0,
	LAMINA_MALFORMED = 1,
	LAMINA_RANGE = 2,
	LAMINA_OVERLAP = 3,
	LAMINA_FULL = 4,
	LAMINA_UNKNOWN = 5,
	LAMINA_FAILED = 6,
};

/* A piece of an answer's text follows. */
struct lamina_response {
	__le32 status;
	__le32 reserved;
	__le64 total;
};

/* Bytes of text that a request, and of a piece that a response may have. */
#define LAMINA_TEXT_BYTES	65536

#endif
