/* Wide tables scroll by themselves: the keyboard shall reach them. The theme makes their wrappers once the page is there. */
addEventListener("load", () => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    box.tabIndex = 0
    box.setAttribute("role", "region")
    box.setAttribute("aria-label", "table")
  }
})
