//! The examples run, and find what they claim.

use std::error::Error;

#[path = "../examples/block.rs"]
mod block;
#[path = "../examples/kv_window.rs"]
mod kv_window;
#[path = "../examples/tensor.rs"]
mod tensor;
#[path = "../examples/view.rs"]
mod view;

#[test]
fn a_block_is_split_and_joined() {
    block::main();
}

#[test]
fn a_kv_window_is_coded_and_read_back() -> Result<(), Box<dyn Error>> {
    kv_window::main()
}

#[test]
fn a_tensor_is_coded_and_read_back() -> Result<(), Box<dyn Error>> {
    tensor::main()
}

#[test]
fn a_view_is_rendered_of_the_planes_it_takes() -> Result<(), Box<dyn Error>> {
    view::main()
}
