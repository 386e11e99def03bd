//! The text form.

use super::*;

#[test]
fn text_reads_as_documented() {
    let layout = LinearLayout::blocked(&[8, 8], &[1, 2], &[8, 4], &[1, 1], &[1, 0]);
    let text = "linear<reg=[[0,1]], lane=[[0,2],[0,4],[1,0],[2,0],[4,0]], warp=[], block=[], shape=[8,8]>";
    assert_eq!(layout.to_string(), text);
    let shared = LinearLayout::shared_row_major(&[2, 4], &[1, 0]);
    assert_eq!(shared.to_string(), "shared<offset=[[0,1],[0,2],[1,0]], shape=[2,4]>");
    assert_eq!(LinearLayout::parse_prefix(&format!("{shared} %x")), Ok((shared, " %x")));
}

#[test]
fn bad_text_is_rejected_with_its_position() {
    let message = |text: &str| text.parse::<LinearLayout>().unwrap_err().to_string();
    assert_eq!(message("blocked<>"), "expected `linear` or `shared` at byte 0 of the layout, found `blocked<>`");
    assert_eq!(
        message("shared<offset=[[0,1], shape=[2,4]>"),
        "expected `[` at byte 22 of the layout, found `shape=[2,4]>`"
    );
    assert_eq!(message("shared<offset=[], shape=[3]>"), "axis 0 has extent 3, expected a power of two of at most 2^31");
    assert_eq!(message("shared<offset=[[4]], shape=[4]>"), "Offset basis 0 is [4], which lies outside the shape [4]");
    assert_eq!(
        message("shared<offset=[[1,1]], shape=[4]>"),
        "Offset basis 0 is [1, 1], expected one coordinate for each of the 1 axes"
    );
    assert_eq!(
        message("shared<offset=[[99999999999]], shape=[4]>"),
        "expected a 32-bit number at byte 16 of the layout, found `99999999999]`"
    );
    assert_eq!(message("shared<offset=[], shape=[1]> x"), "expected the end at byte 29 of the layout, found `x`");
}

proptest! {
    #[test]
    fn parsing_undoes_printing(layout in any_layout()) {
        prop_assert_eq!(layout.to_string().parse::<LinearLayout>(), Ok(layout));
    }

    #[test]
    fn no_text_panics(text in "(linear|shared)?<?[a-z=\\[\\]0-9, ]{0,24}>?") {
        // Any text either fails to parse, or its layout prints as text that parses back.
        if let Ok(layout) = text.parse::<LinearLayout>() {
            prop_assert_eq!(layout.to_string().parse::<LinearLayout>(), Ok(layout));
        }
    }
}
