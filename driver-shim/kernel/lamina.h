/* SPDX-License-Identifier: GPL-2.0-only */
/* The driver's own: a device, and what its two parts offer each other. */
#ifndef LAMINA_H
#define LAMINA_H

#include <linux/completion.h>
#include <linux/genalloc.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/miscdevice.h>
#include <linux/mutex.h>
#include <linux/virtio.h>
#include <linux/virtio_config.h>

#include "lamina_uapi.h"
#include "protocol.h"

/* What mappings in the region are aligned to, as a power of two. */
#define LAMINA_ORDER	21

/*
 * Lives as long as the device is there or a file of it is open.
 *
 * queue_lock is held for a request, which may take minutes, and map_lock
 * around those that change mappings; lock only for a moment, inside of all
 * others, mmap_lock among them.
 */
struct lamina {
	struct kref kref;
	struct virtio_device *vdev;
	struct virtio_shm_region region;
	u64 base_bytes;
	u64 views_bytes;
	struct gen_pool *places;
	struct miscdevice misc;
	int number;
	char name[16];

	struct mutex queue_lock;	/* the queue and its buffers */
	struct virtqueue *queue;
	struct completion answered;
	struct lamina_request *request;
	struct lamina_response *response;
	void *text;
	void *piece;
	bool broken;

	struct mutex map_lock;		/* mappings */
	struct list_head mappings;

	struct mutex lock;		/* gone, files and what they have */
	bool gone;
	struct list_head files;
};

/* file.c */
extern const struct file_operations lamina_fops;
void lamina_release(struct kref *kref);
void lamina_zap(struct lamina *lamina);

/* queue.c */
int lamina_queue_init(struct lamina *lamina);
void lamina_queue_free(struct lamina *lamina);
int lamina_do(struct lamina *lamina, enum lamina_op op, u32 window,
	      u64 offset, u64 length, u64 at);
int lamina_talk(struct lamina *lamina, struct lamina_ask *ask);

#endif
