// Shows the view that the fragment of the URL selects: `#search`, or otherwise the chat.

const DEFAULT = "chat";
const links = [...document.querySelectorAll("#views a[href^='#']")];

export function shownView() {
  return document.body.dataset.view;
}

/** Show the selected view now and after each change of the fragment, and call `onShow` with its name. */
export function followAddress(onShow) {
  const show = () => {
    const isKnown = links.some(({ hash }) => hash === location.hash);
    const name = isKnown ? location.hash.slice(1) : DEFAULT;
    document.body.dataset.view = name;
    links[0].parentElement.hidePopover();
    for (const link of links) {
      if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    onShow(name);
  };
  addEventListener("hashchange", show);
  show();
}
